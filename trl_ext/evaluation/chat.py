"""Talk to a trained model in the terminal, beside the model that it was trained from."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

# No telemetry unless the user asks for it.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from trl_ext.evaluation.command_line import CommandParser, at_least_one, one_line_errors
from trl_ext.files import read_yaml
from trl_ext.models.loading import DTYPES, find_policy, load_policy

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
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(options.model)
    name = folder.resolve().name if folder.is_dir() else options.model
    path, found, is_adapter = find_policy(options.model, dtype=options.dtype)
    base, base_path = options.base or _base_of(folder) or "none", None
    if base != "none":
        try:
            base_path, _, _ = find_policy(base, dtype=options.dtype)
        except FileNotFoundError as error:
            if options.base:
                raise
            print(f"{name} answers alone, without its base, unless --base names it: {error}", file=sys.stderr)
    model, tokenizer = load_policy(path, dtype=options.dtype)
    if not tokenizer.chat_template:
        print(f"{name} has no chat template: it is asked in plain text", file=sys.stderr)
    speakers = [Speaker(name, model, tokenizer, options)]
    if base_path is None:
        return speakers
    # An adapter's base is already in memory.
    shared = is_adapter and Path(base_path) == Path(found)
    loaded = (model, tokenizer) if shared else load_policy(base, dtype=options.dtype)
    return [Speaker(f"{base} (base)", *loaded, options, without_adapter=shared), *speakers]


def _base_of(folder: Path) -> str | None:
    """The base model according to the configuration of the run, also of a checkpoint's run, or of the adapter."""
    run, adapter = "model_name_or_path", "base_model_name_or_path"
    places = {folder / "config.yaml": run, folder.parent / "config.yaml": run, folder / "adapter_config.json": adapter}
    for file, key in places.items():
        if file.is_file():
            # JSON is YAML, too.
            return (read_yaml(file) or {}).get(key)
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

    def answer(self, question: str, seed: int) -> dict[str, Any]:
        """Answer a question in the context of the conversation so far: `text`, `tokens` and `finished`.

        Raises:
            ValueError: the prompt is empty, or leaves no room for `max_new_tokens`.
        """
        from trl_ext.rollouts.generation import generate_responses

        options, turn = self.options, {"role": "user", "content": question}
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = None if context is None else context - options.max_new_tokens
        if room is not None and room < 1:
            raise ValueError(
                f"--max_new_tokens {options.max_new_tokens} leaves no room for a prompt: {self.name} takes {context} "
                "tokens in all"
            )
        with self.model.disable_adapter() if self.without_adapter else nullcontext():
            [given] = generate_responses(
                self.model,
                self.tokenizer,
                [[*self.messages, turn] if self.tokenizer.chat_template else question],
                max_new_tokens=options.max_new_tokens,
                # Drop the beginning of a conversation that is too long.
                max_prompt_tokens=room,
                temperature=options.temperature,
                seed=seed,
            )
        self.messages += [turn, {"role": "assistant", "content": given.text}]
        return {"text": given.text, "tokens": len(given.response_ids), "finished": given.finished}


def questions(options: argparse.Namespace) -> Iterator[str]:
    """Questions from --prompt, the terminal or a pipe; ends with `exit` or the end of the input."""
    if options.prompt is not None:
        yield options.prompt
        return
    if prompt := "> " if sys.stdin.isatty() and not options.json else "":
        print("`new` begins another conversation, `exit` or Ctrl-D ends", file=sys.stderr)
    with suppress(EOFError):
        while (line := input(prompt).strip()) != "exit":
            if line:
                yield line


def talk(speakers: list[Speaker], asked: Iterator[str], options: argparse.Namespace) -> None:
    """Answer the questions one after another, and print the answers below one another or as JSON."""
    for number, question in enumerate(asked):
        if question == "new" and options.prompt is None:
            for speaker in speakers:
                speaker.messages = []
            continue
        answers = [{"model": one.name, **one.answer(question, options.seed + number)} for one in speakers]
        if options.json:
            print(json.dumps({"prompt": question, "answers": answers}, ensure_ascii=False), flush=True)
        else:
            texts = (f"{answer['model']}: {answer['text'].strip() or '(empty)'}\n" for answer in answers)
            asked_here = [] if sys.stdin.isatty() and options.prompt is None else [f"> {question}"]
            print(*asked_here, *texts, sep="\n", flush=True)


if __name__ == "__main__":
    main()
