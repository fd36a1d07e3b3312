"""Train a GPT of 1.5 billion parameters with megatron-core: tensor parallelism of 2, a distributed optimizer."""
# mypy: ignore-errors

import os
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, BATCH, MICROBATCHES, VOCABULARY = 4096, 1, 2, 128256
CONFIG = {
    "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 32, "num_query_groups": 8,
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "activation_func": torch.nn.functional.silu, "bf16": True, "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16, "tensor_model_parallel_size": 2,
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    "gradient_accumulation_fusion": False, "persist_layer_norm": False, "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
}  # fmt: skip


def batches():
    """Tokens drawn at random, for ever."""
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    while True:
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), device="cuda")
        yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions, "attention_mask": None}


def forward_step(data, model):
    """The loss of each token, and what reduces them to one."""
    return model(**next(data)), lambda losses: (losses.float().mean(), {})


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(**CONFIG)
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    ).cuda()  # fmt: skip
    overlapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=40_000_000
    )
    model = DistributedDataParallel(config, overlapping, model)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = partial(finalize_model_grads)
    settings = OptimizerConfig(
        optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(settings, [model])
    step, data = get_forward_backward_func(), batches()
    model.train()
    for _ in range(10):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        step(
            forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        optimizer.step()


if __name__ == "__main__":
    main()
