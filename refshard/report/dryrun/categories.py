"""What memory holds, in words."""

from refshard.dryrun.recording import Category

CATEGORIES = {
    Category.PARAMETERS: "parameters",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER: "optimizer state",
    Category.UNSHARDED: "unsharded parameters",
    Category.ACTIVATIONS: "activations",
    Category.WORKSPACE: "workspaces",
    Category.OTHER: "other",
}
