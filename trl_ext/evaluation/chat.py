"""Talk to a trained model in the terminal, side by side with the model it was trained from."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# No telemetry unless the user asks for it.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from trl_ext.evaluation.command_line import CommandParser, at_least_one, one_line_errors
from trl_ext.files import read_yaml
from trl_ext.models.loading import DTYPES, find_policy, load_policy

# Narrower columns are hard to read.
NARROWEST = 30
DESCRIPTION = """\
Talk to a trained model, beside the model that it was trained from. Each line that you type, or that comes through a
pipe, is a question. Both models are asked with the conversation so far, each with its own answers; `new` begins
another conversation, and `exit` or Ctrl-D ends. Decoding is greedy unless --temperature is given; then both models
are sampled with the same seed. An adapter shares the weights of its base, which are loaded once.

cost    one generation per line and model on this machine; no key, no network but for a model on the hub.
writes  nothing.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, load the models, and answer until there are no more questions."""
    parser = CommandParser(prog="python -m trl_ext.evaluation.chat", description=DESCRIPTION)
    parser.add_argument("model", metavar="RUN", help="a run's folder, a model or adapter, a hub model, toy or smollm2")
    parser.add_argument("--base", help="the model beside it, or none (default: what the run or adapter started from)")
    parser.add_argument("--prompt", help="ask this alone, and end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=at_least_one, default=256, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--single_turn", action="store_true", help="ask each line by itself")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as saved)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each question")
    with one_line_errors():
        options = parser.parse_args(arguments)
        speakers = load_speakers(options)
        try:
            talk(speakers, questions(options), options)
        except KeyboardInterrupt:
            print()


def load_speakers(options: argparse.Namespace) -> list[Speaker]:
    """The requested model and, if known, its base.

    Raises:
        FileNotFoundError, ValueError: a model does not exist or is not a language model.
    """
    path, shown = _saved_model(options.model)
    base = options.base or _base_of(path)
    policy, found, is_adapter = find_policy(path, dtype=options.dtype)
    base_path, base_is_adapter = None, False
    if base is None and options.model not in ("toy", "smollm2"):
        print(f"{shown} does not say what it was trained from: --base names a model beside it", file=sys.stderr)
    elif base not in (None, "none"):
        try:
            _, base_path, base_is_adapter = find_policy(base, dtype=options.dtype)
        except FileNotFoundError as error:
            if options.base:
                raise
            print(f"{shown} answers alone, without its base, unless --base names it: {error}", file=sys.stderr)

    from transformers.utils import logging

    logging.disable_progress_bar()
    model, tokenizer = load_policy(policy, dtype=options.dtype)
    if not tokenizer.chat_template:
        print(f"{shown} has no chat template: it is asked in plain text", file=sys.stderr)
    speakers = [Speaker(shown, model, tokenizer, options)]
    if base_path is None:
        return speakers
    if is_adapter and not base_is_adapter and Path(base_path) == Path(found):
        # The adapter's base is already in memory.
        return [Speaker(f"{base} (base)", model, tokenizer, options, without_adapter=True), *speakers]
    return [Speaker(f"{base} (base)", *load_policy(base, dtype=options.dtype), options), *speakers]


def _saved_model(name: str) -> tuple[str, str]:
    """The folder to load and its display name; for an unfinished run, the last checkpoint."""
    folder = Path(name)
    if not folder.is_dir() or any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return name, name if not folder.is_dir() else folder.resolve().name
    from transformers.trainer_utils import get_last_checkpoint

    last = get_last_checkpoint(name)
    if last is None:
        return name, name
    step = Path(last).name
    print(f"{name} holds no finished model: this is its {step}", file=sys.stderr)
    return last, f"{folder.resolve().name}/{step}"


def _base_of(path: str) -> str | None:
    """The base model according to the run's or the adapter's configuration."""
    for config in (Path(path) / "config.yaml", Path(path).parent / "config.yaml"):
        if config.is_file():
            settings = read_yaml(config)
            return settings.get("model_name_or_path") if isinstance(settings, dict) else None
    adapter = Path(path) / "adapter_config.json"
    if adapter.is_file():
        return json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return None


class Speaker:
    """A model and its side of the conversation.

    Args:
        name: name shown above its answers.
        model: a causal language model.
        tokenizer: its tokenizer; without a chat template, every question is asked on its own, as plain text.
        options: command-line options.
        without_adapter: whether to disable the model's adapter.
    """

    def __init__(self, name: str, model, tokenizer, options: argparse.Namespace, without_adapter: bool = False):
        self.name, self.model, self.tokenizer, self.options = name, model, tokenizer, options
        self.without_adapter = without_adapter
        self.messages: list[dict[str, str]] = []
        self.remembers = bool(tokenizer.chat_template) and not options.single_turn

    def answer(self, question: str, seed: int) -> dict[str, Any]:
        """Answer a question in the context of the conversation so far: `text`, `tokens` and `finished`.

        Raises:
            ValueError: the prompt is empty, or leaves no room for `max_new_tokens`.
        """
        from trl_ext.rollouts.generation import generate_responses

        turn = {"role": "user", "content": question}
        if not self.remembers:
            self.messages = []
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = None if context is None else context - self.options.max_new_tokens
        if room is not None and room < 1:
            raise ValueError(
                f"--max_new_tokens {self.options.max_new_tokens} leaves no room for a prompt: {self.name} takes "
                f"{context} tokens in all"
            )
        conversation = [*self.messages, turn]
        with self.model.disable_adapter() if self.without_adapter else nullcontext():
            [given] = generate_responses(
                self.model,
                self.tokenizer,
                [conversation if self.tokenizer.chat_template else question],
                max_new_tokens=self.options.max_new_tokens,
                # Drop the beginning of a conversation that is too long.
                max_prompt_tokens=room,
                temperature=self.options.temperature,
                seed=seed,
            )
        self.messages += [turn, {"role": "assistant", "content": given.text}]
        return {"text": given.text, "tokens": len(given.response_ids), "finished": given.finished}


def questions(options: argparse.Namespace) -> Iterator[str]:
    """Questions from --prompt, the terminal or a pipe; ends with `exit`, `quit` or the end of the input."""
    if options.prompt is not None:
        yield options.prompt
        return
    terminal = sys.stdin.isatty()
    if terminal:
        print("`new` begins another conversation, `exit` or Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = input("> " if terminal and not options.json else "").strip()
        except EOFError:
            return
        if line in ("exit", "quit"):
            return
        if line:
            if not terminal and not options.json:
                print(f"> {line}")
            yield line


def talk(speakers: list[Speaker], asked: Iterator[str], options: argparse.Namespace) -> None:
    """Answer the questions one after another, and print the answers side by side or as JSON."""
    for number, question in enumerate(asked):
        if question == "new" and options.prompt is None:
            for speaker in speakers:
                speaker.messages = []
            continue
        answers = {speaker.name: speaker.answer(question, options.seed + number) for speaker in speakers}
        if options.json:
            rows = [{"model": name, **answer} for name, answer in answers.items()]
            print(json.dumps({"prompt": question, "answers": rows}, ensure_ascii=False), flush=True)
        else:
            print(side_by_side({name: answer["text"] or "(empty)" for name, answer in answers.items()}), flush=True)


def side_by_side(texts: dict[str, str], width: int | None = None) -> str:
    """Texts in columns under their names, wrapped to the terminal; one below the other if it is narrow."""
    width = width or shutil.get_terminal_size().columns
    column = (width - 2 * (len(texts) - 1)) // len(texts)
    if len(texts) > 1 and column < NARROWEST:
        return "\n".join(side_by_side({name: text}, width) for name, text in texts.items())
    wrapped = [
        [line for part in f"{name}:\n{text.strip()}".splitlines() for line in textwrap.wrap(part, column) or [""]]
        for name, text in texts.items()
    ]
    rows = itertools.zip_longest(*wrapped, fillvalue="")
    return "\n".join("  ".join(cell.ljust(column) for cell in row).rstrip() for row in rows) + "\n"


if __name__ == "__main__":
    main()
