#!/bin/bash
# Two processes under Open MPI 4; further flags are passed on. With several machines, add --hostfile=FILE.
: "${CONFIG:=quickstart}" "${WORKDIR:=runs/mpi}"
exec mpirun -np 2 --bind-to none mlcn_jax train --config="$CONFIG" --workdir="$WORKDIR" \
    --config.parallel.processes=0 --config.parallel.lane=2 "$@"
