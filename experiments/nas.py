"""Says where the search is now."""

from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch, program


def main() -> None:
    raise InputError(f"the search is a command now, with the same flags: {program()} search --config=... --workdir=...")


if __name__ == "__main__":
    launch(main)
