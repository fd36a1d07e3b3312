"""What the device computed: operators and kernels, their FLOPs, and what slows them down."""
