"""Plain torch forms of the kernels, for any torch device: what the kernels are tested against, and what a device with
`--kernels torch` runs. Signatures are those of the launchers in `devices/cuda/kernels/`."""
