"""The subcommands of the `ramify` console script, one file each. They never import torch."""
