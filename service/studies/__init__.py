"""What is done with a study, by the command line and the server alike.

`preflight`  everything that can be checked before an engine starts
`dry_run`    `run --check`: what running a study will take
`local_run`  a study in a directory of this machine
`attempt`    one attempt to take a study to its end
`export`     the merged model of a trial as files
`merge`      one merge that a file describes, without a search
"""
