"""What users and operators meet: commands, the server, and what drives a study. Where things live:

commands         `cli` parses and calls; `terminal`, `tables`, `progress` and `export_view` print; `remote` has the
                 verbs that ask a server
before a study   `preflight` examines it, `check` tells the plan, `disk` measures the room
a study at work  `run` (in a directory, by itself) and `study_job` (for the server, as a Ray Job) open what
                 `execution` needs to take it to its end; `ray_session` is the Ray of one command; `tune` searches
what it found    `run_record` reads it from the store, `selection` and `statistics` judge it, `results` writes the
                 files whose shapes `documents` has, `report` draws the page
merged models    `export` writes those of a study, `merge` those that a file describes
the server       `serve` is the process; `api` answers, with the documents of `answers` too; `cluster` keeps a driver at
                 work on every study, `ray_host` a Ray beside it; `client` asks
below it all     `store` remembers, `types` and `errors` are passed around
"""
