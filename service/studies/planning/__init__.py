"""Plans of studies: the memory and the time that a study takes on given machines, from headers of models alone.

- `profiles`: the speeds and the memory of machines, declared with their sources
- `named`: the profile that a name or a file means
- `here`: the speeds and the memory of this machine, measured
- `facts`: the sizes of a family from which seconds and bytes follow
- `roofline`: seconds of an engine's start, a swap, an evaluation, a gradient step and a verification
- `placement`: where engines, source weights, gradients and verification go, the memory of each, and what does not fit
- `schedule`: the work of a study, its hours and its GPU-hours
- `plan`: the whole plan of a study
- `chart`: values of the Helm chart for a study
"""
