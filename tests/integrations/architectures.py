"""Real architectures, small and with random weights: the rows of the table.

A row is a function that makes a module and its arguments for a batch of some size. Modules are in evaluation
mode and in double precision; `loss_of` is a sum over examples, so that shares of a batch add up.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

VOCABULARY = 32


class Case(NamedTuple):
    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    loss_of: Callable[[Any], torch.Tensor]


def images(size):
    return torch.randn(size, 3, 32, 32, dtype=torch.float64)


def tokens(size, length=6):
    return torch.randint(1, VOCABULARY, (size, length))


def of_tensor(result):
    return result.square().sum()


def of_logits(result):
    return result.logits.square().sum()


def torchvision_resnet18(size):
    models = pytest.importorskip("torchvision").models
    return Case(models.resnet18(num_classes=4), {"x": images(size)}, of_tensor)


def timm_resnet(size):
    timm = pytest.importorskip("timm")
    return Case(timm.create_model("resnet10t", num_classes=4), {"x": images(size)}, of_tensor)


def timm_vit(size):
    timm = pytest.importorskip("timm")
    vit = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4, drop_rate=0.2
    )
    return Case(vit, {"x": images(size)}, of_tensor)


def gpt2_module():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2(size):
    return Case(gpt2_module(), {"input_ids": tokens(size)}, of_logits)


def bert(size):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    mask = torch.ones(size, 6, dtype=torch.int64)
    mask[:, 4:] = torch.arange(size)[:, None] % 2
    inputs = {"input_ids": tokens(size), "attention_mask": mask}
    return Case(transformers.BertForMaskedLM(config), inputs, of_logits)


def llama(size):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        attention_dropout=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    inputs = {"input_ids": tokens(size), "position_ids": torch.arange(6)[None]}
    return Case(transformers.LlamaForCausalLM(config), inputs, of_logits)


def lora(size):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, lora_dropout=0.2
    )
    return Case(peft.get_peft_model(gpt2_module(), config), {"input_ids": tokens(size)}, of_logits)


class PackedLSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.lstm = torch.nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, ids, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = torch.nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1]
        )
        return self.last(hidden)


def lstm(size):
    inputs = {"ids": tokens(size), "lengths": torch.arange(size) % 4 + 1}
    return Case(PackedLSTM(), inputs, of_tensor)


class MixtureOfExperts(torch.nn.Module):
    """Each example goes to one expert; the last is used by none, others by some replicas."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2))
            for _ in range(5)
        )

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts[:-1]):
            chosen = gates.argmax(-1) == number
            if chosen.any():
                result[chosen] = expert(x[chosen]) * gates[chosen, number : number + 1]
        return result


def mixture_of_experts(size):
    return Case(MixtureOfExperts(), {"x": torch.randn(size, 8, dtype=torch.float64)}, of_tensor)


class SparseEmbeddings(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, 8, sparse=True)
        self.bags = torch.nn.EmbeddingBag(VOCABULARY, 8, sparse=True)
        self.rest = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))

    def forward(self, ids):
        return self.rest(self.words(ids).sum(1) + self.bags(ids))


def sparse_embeddings(size):
    return Case(SparseEmbeddings(), {"ids": tokens(size)}, of_tensor)


ARCHITECTURES = {
    "torchvision resnet18": torchvision_resnet18,
    "timm resnet": timm_resnet,
    "timm ViT": timm_vit,
    "GPT-2": gpt2,
    "BERT": bert,
    "LLaMA": llama,
    "GPT-2 with LoRA": lora,
    "LSTM": lstm,
    "mixture of experts": mixture_of_experts,
    "sparse embeddings": sparse_embeddings,
}

LIBRARIES = {
    "torchvision resnet18": "torchvision",
    "timm resnet": "timm",
    "timm ViT": "timm",
    "GPT-2": "transformers",
    "BERT": "transformers",
    "LLaMA": "transformers",
    "GPT-2 with LoRA": "peft",
}
"""What rows need beyond PyTorch."""

WITHOUT_DROPOUT = frozenset(("torchvision resnet18", "timm resnet"))
"""Rows whose modules draw no random numbers in training."""


def case_of(name, size):
    """A row's module, the same at every call, and its arguments."""
    torch.manual_seed(0)
    case = ARCHITECTURES[name](size)
    case.module.double().eval()
    return case
