"""`python -m mlcn_jax COMMAND`: the same as the command `mlcn_jax`."""

from mlcn_jax.commands.front import main

if __name__ == "__main__":
    main()
