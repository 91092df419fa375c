"""Makes a new Llama of 4 layers and 128 hidden units, with a tokenizer trained on Python's standard library."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path("build/small_llama")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def make_small_llama(writes: bool = True) -> Path:
    """The folder. Only the process that ``writes`` makes it, if it is not there."""
    if not writes or (FOLDER / "config.json").exists():
        return FOLDER
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
    made.train([str(file) for file in sorted(Path(os.__file__).parent.glob("*.py"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(FOLDER)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(FOLDER)
    return FOLDER


if __name__ == "__main__":
    print(make_small_llama())
