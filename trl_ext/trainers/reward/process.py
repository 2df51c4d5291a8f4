"""Process reward models: token classifiers that say at the last token of each step whether the step is right."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trl_ext.data.conversation import Messages
from trl_ext.data.truncation import text_ids


def encode_steps(
    tokenizer, prompt: Messages | str, steps: list[str], separator: str = "\n"
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and steps, each followed by the separator, and the place of the last token of each step.

    Each step is tokenized by itself, so that no token is of two steps.
    """
    if isinstance(prompt, str):
        ids = text_ids(tokenizer, prompt)
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids, places = list(ids), []
    for step in steps:
        for text in (step, separator):
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        places.append(len(ids) - 1)
    return ids, places


def process_row(
    tokenizer, prompt: Messages | str, steps: list[str], right: list[bool], separator: str = "\n"
) -> dict[str, list[int]]:
    """A row to train on, `input_ids` and `labels`: 1 or 0 at the last token of each step, and -100 elsewhere.

    The loss of transformers' token classifiers is then the two-class cross-entropy, averaged over steps.

    Lightman et al. 2023, arXiv 2305.20050.
    """
    ids, places = encode_steps(tokenizer, prompt, steps, separator)
    labels = [-100] * len(ids)
    for place, is_right in zip(places, right, strict=True):
        labels[place] = int(is_right)
    return {"input_ids": ids, "labels": labels}


class ProcessReward:
    """A reward function that gives each step the probability of being right: a saved token classifier of two classes.

    Class 1 is "right". The steps are those that `PolicyTrainer` passes for an advantage of steps. The model is loaded
    at the first call, onto this process's GPU if there is one.

    Args:
        folder_or_hub_name: where the classifier and its tokenizer were saved.
        separator: what followed each step in training.
        batch_size: responses per forward pass.
    """

    def __init__(self, folder_or_hub_name: str | Path, *, separator: str = "\n", batch_size: int = 16):
        self.path, self.separator, self.batch_size = str(folder_or_hub_name), separator, batch_size
        self.__name__ = Path(self.path).name

    @cached_property
    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    @cached_property
    def model(self):
        from accelerate import PartialState
        from transformers import AutoModelForTokenClassification

        model = AutoModelForTokenClassification.from_pretrained(self.path)
        if model.config.num_labels != 2:
            raise ValueError(f"{self.path} has {model.config.num_labels} classes, and a process reward model has 2")
        return model.eval().to(PartialState().device)

    @torch.no_grad()
    def __call__(self, prompts: list[Messages | str], steps: list[list[str]], **_: Any) -> list[list[float]]:
        """Probabilities, one list for each response; TRL's reward signature with the texts of the steps."""
        encoded = [encode_steps(self.tokenizer, *pair, self.separator) for pair in zip(prompts, steps, strict=True)]
        found: list[list[float]] = []
        for start in range(0, len(encoded), self.batch_size):
            batch = encoded[start : start + self.batch_size]
            # On the right, where causal attention does not see it.
            width = max(len(ids) for ids, _ in batch)
            rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch], device=self.model.device)
            mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch]).to(rows)
            right = self.model(input_ids=rows, attention_mask=mask).logits.float().softmax(-1)[..., 1].cpu()
            found += [right[row, places].tolist() for row, (_, places) in enumerate(batch)]
        return found
