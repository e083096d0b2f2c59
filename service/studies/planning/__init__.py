"""Plans of studies: the memory and the time that a study takes on given machines, computed from headers of models.

- `profiles`: the speeds and the memory of kinds of machines, with the sources of these figures
- `named`: the profile with a given name, or from a file
- `here`: the speeds and the memory of this machine, measured
- `facts`: the sizes of a family's models, from which seconds and bytes are computed
- `roofline`: seconds of an engine's start, a swap, an evaluation, a gradient step and a verification
- `placement`: the places and the memory of engines, source weights, gradients and verification, and missing resources
- `schedule`: the phases of a study, with the seconds of each
- `advice`: changes that make a study shorter, where the CPU computes because engines use every GPU
- `plan`: the whole plan of a study
- `chart`: values of the Helm chart for a study
"""
