"""Train a Llama of 1.2 billion parameters with Lightning's Trainer and its FSDP strategy."""
# mypy: ignore-errors

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

SEQUENCE, BATCH = 4096, 2
CONFIG = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    use_cache=False,
)  # fmt: skip


class Llama(L.LightningModule):
    """The model, its loss and its optimizer."""

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_config(CONFIG).train()

    def training_step(self, batch):
        (ids,) = batch
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=3e-4)


def main():
    tokens = torch.randint(CONFIG.vocab_size, (256, SEQUENCE))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=BATCH)
    strategy = FSDPStrategy(
        auto_wrap_policy={LlamaDecoderLayer}, activation_checkpointing_policy={LlamaDecoderLayer},
        sharding_strategy="FULL_SHARD",
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cuda", devices=8, strategy=strategy, precision="bf16-mixed", max_steps=10,
        enable_checkpointing=False, logger=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Llama(), loader)


if __name__ == "__main__":
    main()
