"""Types of JSON documents (TypedDict) shared by server, client and command line.

- `files`: the result files of a run: trials.jsonl, summary.json, pareto.json
- `recipe`: recipe.json
- `plan`: the document of `mergesearch plan --json`
- `api`: the server's other responses: jobs, events, exports, problems
- `json_schemas`: JSON Schemas of result files, studies and fine-tunings
"""
