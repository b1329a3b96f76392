#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT=6000
NUM_NODES=$SLURM_NNODES
NODE_RANK=$SLURM_NODEID
CHECKPOINT_PATH=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --save $CHECKPOINT_PATH
)
torchrun ${DISTRIBUTED_ARGS[@]} train.py ${GPT_MODEL_ARGS[@]}
