"""Every command, from a clone: `python main.py --help` lists them.

    python main.py --config=configs/mlcn2_cifar.py --workdir=runs/mlcn2 --config.train.batch_size=300
    python main.py --mode=evaluate --workdir=runs/mlcn2
    python main.py explain --workdir=runs/mlcn2

The same training command resumes an unfinished run. A config file is Python that is executed: run only those you trust.
"""

from mlcn_jax.commands.front import main

if __name__ == "__main__":
    main()
