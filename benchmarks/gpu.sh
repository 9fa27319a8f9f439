#!/usr/bin/env bash
# All measurements that need a GPU, against PyTorch: bash benchmarks/gpu.sh [FOLDER]
# Installs what it needs. Environments that are there can be given: PYTHON with this project's requirements (CUDA), and
# PEERS_PYTHON with PyTorch (CUDA); they may be the same.
# DTYPES and NETWORKS, where set, shorten it: DTYPES=bfloat16 NETWORKS=mlcn1_4x4_28x28x1,capsnet_28x28x1
# CIFAR_DIR and FASHION_DIR are folders with the data sets, downloaded where not set. RUNS keeps the trainings, which go on
# where they stopped. JSON goes to FOLDER, benchmarks/results/gpu where none is given.
set -eu
cd "$(dirname "$0")/.."
[ -n "${PYTHON:-}" ] || make --no-print-directory setup CUDA=1
[ -n "${PEERS_PYTHON:-}" ] || make --no-print-directory .venv-peers/installed
python="${PYTHON:-.venv/bin/python}" peers="${PEERS_PYTHON:-.venv-peers/bin/python}"
out="${1:-benchmarks/results/gpu}"
mkdir -p "$out"
export JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 # as PyTorch in benchmarks/frameworks/in_torch.py
"$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu" and "jax sees no GPU")'
for dtype in ${DTYPES:-float32 bfloat16}; do
  options=(--peers=torch --peers_python="$peers" --dtype="$dtype" ${NETWORKS:+--networks="$NETWORKS"})
  "$python" -m benchmarks.train_step "${options[@]}" --nofamilies --out="$out/train_step_$dtype.json"
  "$python" -m benchmarks.inference "${options[@]}" --out="$out/inference_$dtype.json"
done
"$python" -m benchmarks.conv_algorithms --dtype=bfloat16
mv benchmarks/results/conv_algorithms_gpu.json "$out/"
residual=(--workdir="${RUNS:-runs/residual_lanes_gpu}" --cifar_dir="${CIFAR_DIR:-}" --fashion_dir="${FASHION_DIR:-}")
"$python" -m experiments.residual_lanes "${residual[@]}" --repeats=3
"$python" -m experiments.residual_lanes "${residual[@]}" --repeats=3 --rows=cifar_8xw8d3,fashion_8xw8d3
