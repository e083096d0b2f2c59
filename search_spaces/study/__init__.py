"""The study file: the models to merge, the space to search, and the limits of cost.

- `file`: a whole study: loading, parsing, its JSON Schema; the section `limits`
- `models`: the section `models`; references to other studies
- `search`: the sections `search_space` and `search`
- `fidelity`: the section `fidelity`
- `objectives`: the sections `objectives` and `holdout`
- `image_suites`: the image tasks that a study file can name, such as SUN397 and DTD
- `benchmarks`: the sections `benchmarks` and `contamination`
- `attacks`: the option `attack` of a benchmark
- `judge`: the option `judge` of a benchmark
- `engine`: the section `engine`; the options of one engine
- `checks`: contradictions between fields
- `validation`: pydantic's errors as messages for users
- `yaml`: strict reading of YAML and JSON
"""
