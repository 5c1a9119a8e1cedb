"""A random-weight Llama of 0.9 B parameters with a tokenizer of its own, in a folder: for a real server to serve.

    python make_model.py FOLDER

Needs torch, transformers and tokenizers; takes some 10 s. What it writes means nothing, at a real model's speed.
"""

import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def tokenizer(folder):
    words = random.Random(7)
    text = [" ".join("".join(words.choices("abcdefghij klmnop", k=7)) for _ in range(60)) for _ in range(400)]
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=32768
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    size = tokenizer(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=size, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        torch_dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = None  # nothing ends early: every answer has the length asked for
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
