"""Talk to a trained model in the terminal, beside the model that it was trained from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from trl_ext.evaluation.command_line import CommandParser, at_least_one, one_line_errors
from trl_ext.files import read_yaml
from trl_ext.models.loading import find_policy, load_policy

DESCRIPTION = """\
Talk to a trained model, beside the model that it was trained from. Each line that you type, or that comes through a
pipe, is a question. Both models are asked with the conversation so far, each with its own answers; `new` begins
another conversation, and `exit` or Ctrl-D ends. Decoding is greedy unless --temperature is given; then both models
are sampled with the same seed. An adapter shares the weights of its base, which are loaded once.
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, load the models, and answer until there are no more questions."""
    parser = CommandParser(prog="python -m trl_ext.evaluation.chat", description=DESCRIPTION)
    parser.add_argument("model", metavar="RUN", help="a run's folder, a model or adapter, a hub model, toy or smollm2")
    parser.add_argument("--base", help="the model beside it, or none (default: what the run or adapter started from)")
    parser.add_argument("--prompt", help="ask this alone, and end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=at_least_one, default=256, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each question")
    with one_line_errors(), suppress(KeyboardInterrupt):
        options = parser.parse_args(arguments)
        speakers = load_speakers(options.model, options.base or base_of(Path(options.model)) or "none")
        sampling = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
        for number, question in enumerate(_questions(options.prompt)):
            if question == "new":
                for one in speakers:
                    one.messages.clear()
                continue
            answers = [(one.name, one.answer(question, seed=options.seed + number, **sampling)) for one in speakers]
            if options.json:
                found = [{"model": name, "text": text} for name, text in answers]
                print(json.dumps({"prompt": question, "answers": found}, ensure_ascii=False), flush=True)
            else:
                texts = (f"{name}: {text.strip() or '(empty)'}\n" for name, text in answers)
                print(*([] if sys.stdin.isatty() else [f"> {question}"]), *texts, sep="\n", flush=True)


def load_speakers(model: str, base: str) -> list[Speaker]:
    """The model's base, unless it is `none`, and the model."""
    path, found, is_adapter = find_policy(model)
    base_path = None if base == "none" else find_policy(base)[0]
    policy = load_policy(path)
    speakers = [Speaker(Path(model).name, *policy)]
    if base_path is not None:
        # An adapter's base is already in memory.
        shared = is_adapter and Path(base_path) == Path(found)
        loaded = policy if shared else load_policy(base)
        speakers.insert(0, Speaker(f"{base} (base)", *loaded, without_adapter=shared))
    return speakers


def base_of(folder: Path) -> str | None:
    """The base model according to the configuration of the run, also of a checkpoint's run, or of the adapter."""
    run, adapter = "model_name_or_path", "base_model_name_or_path"
    places = {folder / "config.yaml": run, folder.parent / "config.yaml": run, folder / "adapter_config.json": adapter}
    # JSON is YAML, too.
    return next((read_yaml(file).get(key) for file, key in places.items() if file.is_file()), None)


class Speaker:
    """A model and its side of the conversation; without a chat template, every question is asked on its own."""

    def __init__(self, name: str, model, tokenizer, without_adapter: bool = False):
        self.name, self.model, self.tokenizer, self.without_adapter = name, model, tokenizer, without_adapter
        self.messages: list[dict[str, str]] = []

    def answer(self, question: str, *, max_new_tokens: int, **sampling: float) -> str:
        """Answer a question in the context of the conversation so far; the beginning of a long one is dropped."""
        from trl_ext.rollouts.generation import generate_responses

        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = None if context is None else context - max_new_tokens
        if room is not None and room < 1:
            raise ValueError(f"--max_new_tokens {max_new_tokens} leaves no room for a prompt in {context} tokens")
        turn = {"role": "user", "content": question}
        prompt = [*self.messages, turn] if self.tokenizer.chat_template else question
        limits = {"max_prompt_tokens": room, "max_new_tokens": max_new_tokens}
        with self.model.disable_adapter() if self.without_adapter else nullcontext():
            [given] = generate_responses(self.model, self.tokenizer, [prompt], **limits, **sampling)
        self.messages += [turn, {"role": "assistant", "content": given.text}]
        return given.text


def _questions(prompt: str | None) -> Iterator[str]:
    """The --prompt, or lines from the terminal or a pipe up to `exit`."""
    if prompt is not None:
        yield prompt
        return
    with suppress(EOFError):
        while (line := input("> " if sys.stdin.isatty() else "").strip()) != "exit":
            if line:
                yield line


if __name__ == "__main__":
    main()
