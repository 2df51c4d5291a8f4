"""How many parameters a model has and trains, counted from its configuration without loading a weight."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class ModelSize:
    """What the memory of a model depends on.

    Attributes:
        total: parameters, those that two modules share counted once; an adapter's among them.
        trained: those that training changes.
        adapter: of an adapter, with the modules that are saved beside it; 0 without.
        quantizable: weights of linear layers outside the head, which 4 and 8 bits apply to.
        layers, hidden, intermediate: sizes of the transformer.
        outputs: of its head for each token; 1 of a reward model.
        key_values: numbers that a token leaves in the cache of keys and values in a layer.
        dtype: of the saved weights, such as bfloat16; None where the configuration does not say.
    """

    total: int
    trained: int
    adapter: int
    quantizable: int
    layers: int
    hidden: int
    intermediate: int
    outputs: int
    key_values: int
    dtype: str | None

    @property
    def base(self) -> int:
        """Parameters of the model beneath an adapter."""
        return self.total - self.adapter


def model_size(
    name_or_path: str, *, revision: str | None = None, peft_config=None, classifier: bool = False
) -> ModelSize:
    """The `ModelSize` of a model by its configuration, which alone is read, or fetched from the hub.

    Args:
        name_or_path: folder or hub name; of a saved adapter, its base is counted.
        revision: of the hub's repository.
        peft_config: of an adapter to put on it; None to train all parameters.
        classifier: with a head of one score in place of the language model's, as a reward model has.

    Raises:
        OSError: no such model.
        ValueError: its code would have to be fetched with it, or no adapter can be put on it.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_of(name_or_path), revision=revision, trust_remote_code=False)
    if classifier:
        config.num_labels = 1
    with torch.device("meta"):
        model = _build(config, classifier)
        model.tie_weights()
        base = _count(model.parameters())
        if peft_config is not None:
            from peft import get_peft_model

            if classifier:
                peft_config.task_type = "SEQ_CLS"
            model = get_peft_model(model, peft_config)
    total, trained = _count(model.parameters()), _count(p for p in model.parameters() if p.requires_grad)
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelSize(
        total=total,
        trained=trained,
        adapter=total - base,
        quantizable=_quantizable(model),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        outputs=1 if classifier else text.vocab_size,
        key_values=2 * (getattr(text, "num_key_value_heads", None) or heads) * head_size,
        dtype=None if config.dtype is None else str(config.dtype).removeprefix("torch."),
    )


def base_of(name_or_path: str) -> str:
    """The base of a folder that holds an adapter alone; what is given of any other."""
    folder = Path(name_or_path)
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():
        return json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return name_or_path


def _build(config, classifier: bool):
    """The model of a configuration without weights, of the class that the trainers load it as."""
    import transformers

    if classifier:
        return transformers.AutoModelForSequenceClassification.from_config(config)
    named = getattr(transformers, (config.architectures or ["none"])[0], None)
    # A base model without a head is saved under its own name, and trained with one.
    if named is not None and hasattr(named, "_from_config") and getattr(named, "can_generate", bool)():
        return named._from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _count(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _quantizable(model) -> int:
    head = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = model.get_output_embeddings()
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and "lora_" not in name and "score" not in name
    ]
    return sum(module.weight.numel() for module in layers)
