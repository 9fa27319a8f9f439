#!/usr/bin/env bash
# All measurements that need a GPU, against PyTorch: bash benchmarks/gpu.sh [FOLDER]
# Installs what it needs. Environments that are there can be given: PYTHON with this project's requirements (CUDA), and
# PEERS_PYTHON with PyTorch (CUDA); they may be the same.
# DTYPES, NETWORKS and PARTS, where set, shorten it: DTYPES=bfloat16 NETWORKS=mlcn1_4x4_28x28x1,resnet PARTS="compare recipes"
# The parts are: compare, with PyTorch; algorithms, of convolutions; memory, of `model.remat`; recipes, which train.
# CIFAR_DIR and FASHION_DIR are folders with the data sets, downloaded where not set. RUNS keeps the trainings, which go on
# where they stopped; their JSON goes to experiments/results, that of speeds to FOLDER, or to benchmarks/results/gpu.
# A measurement that fails does not stop the others: they are named at the end, and the exit code is then 1.
set -eu
cd "$(dirname "$0")/.."
[ -n "${PYTHON:-}" ] || make --no-print-directory setup CUDA=1
[ -n "${PEERS_PYTHON:-}" ] || make --no-print-directory .venv-peers/installed
python="${PYTHON:-.venv/bin/python}" peers="${PEERS_PYTHON:-.venv-peers/bin/python}"
out="${1:-benchmarks/results/gpu}"
mkdir -p "$out"
export JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 # as PyTorch in benchmarks/frameworks/in_torch.py
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the GPU; most bytes in use are counted either way
"$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu" and "jax sees no GPU")'
failed=()
measure() { "$python" -m "$@" || failed+=("$*"); }
networks="$("$python" -c 'import sys; from benchmarks import networks
print(*(network.name for network in networks.chosen(sys.argv[1].split(","))))' "${NETWORKS:-all}")"
parts=" ${PARTS:-compare algorithms memory recipes} "
for part in $parts; do
  [[ " compare algorithms memory recipes " == *" $part "* ]] || { echo "error: PARTS has $part" >&2; exit 2; }
done
for dtype in ${DTYPES:-float32 bfloat16}; do
  for network in $networks; do
    [[ $parts == *" compare "* ]] || break
    options=(--peers=torch --peers_python="$peers" --dtype="$dtype" --networks="$network")
    measure benchmarks.train_step "${options[@]}" --out="$out/train_step_${dtype}_$network.json"
    measure benchmarks.inference "${options[@]}" --out="$out/inference_${dtype}_$network.json"
  done
  [[ $parts != *" algorithms "* ]] ||
    measure benchmarks.conv_algorithms --dtype="$dtype" --out="$out/conv_algorithms_$dtype.json"
done
[[ $parts != *" memory "* ]] || measure benchmarks.remat --output="$out/remat.json"
if [[ $parts == *" recipes "* ]]; then
  unset JAX_DEFAULT_MATMUL_PRECISION
  runs="${RUNS:-runs/residual_lanes_gpu}" images=(--cifar_dir="${CIFAR_DIR:-}" --fashion_dir="${FASHION_DIR:-}")
  measure experiments.residual_lanes --workdir="$runs" "${images[@]}" --repeats=3
  long=trial_cifar_long
  measure experiments.residual_lanes --workdir="${runs}_trials" "${images[@]}" \
    --rows="${long}_w4d3,${long}_w6_shift,${long}_w6_between,${long}_w6d3_between,${long}_w6_sgd,${long}_w6_lower_rate"
  measure experiments.residual_lanes --workdir="$runs" "${images[@]}" --repeats=3 --rows=cifar_8xw8d3,fashion_8xw8d3
fi
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
