"""The search of one study, on Ray Tune.

decides     `schedulers` and their `rung_table` say what is evaluated next and who is promoted, `searchers` propose
keeps       `coordinator` turns what is stored into the next of the `evaluations` and results into what is stored, by
            the `plan`, with `samples` and `evidence` as its books
executes    `driver` runs evaluations on Tune, `trainable` is the trial actor
"""
