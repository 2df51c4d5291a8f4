"""Token ids of prompts and responses, tokenized and truncated separately, in training and in scoring."""

from __future__ import annotations

import os
from typing import Any

from trl_ext.processes import warn_once_per_run

Messages = list[dict[str, Any]]


def encode_turn(
    tokenizer,
    prompt: Messages | str,
    response: Messages | str,
    *,
    finished: bool = True,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    template_kwargs: dict[str, Any] | None = None,
    verbatim: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and its response, tokenized separately as in generation.

    Args:
        tokenizer: a tokenizer, with a chat template if the prompt is messages.
        prompt: messages, or plain text.
        response: text, or a list of one assistant message.
        finished: False for a truncated response, which is rendered without what the template puts after a response.
        max_prompt_tokens: longer prompts lose their beginning; None for no limit.
        max_response_tokens: longer responses lose their end, the end-of-turn token included; None for no limit.
        template_kwargs: arguments for the chat template in addition to the messages, such as `tools`.
        verbatim: keep a text with `</think>` as it is where the template would set other spaces around the thoughts.

    Returns:
        Prompt ids and response ids; a reward model reads their concatenation.

    Raises:
        ValueError: the chat template does not render a conversation as its prompt followed by the response, or a limit
            is below 1.
    """
    for name, limit in (("max_prompt_tokens", max_prompt_tokens), ("max_response_tokens", max_response_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}; pass None for no limit")
    if not isinstance(response, str) and len(response) != 1:
        raise ValueError(f"a response is one assistant message, got {len(response)} messages")
    text = response if isinstance(response, str) else response[0]["content"]
    # The tokenizer warns about texts that are too long for the model, but they are cut here.
    warn_of_prompts, warn_of_responses = (
        {"verbose": limit is None} for limit in (max_prompt_tokens, max_response_tokens)
    )
    if isinstance(prompt, str):
        prompt_ids = text_ids(tokenizer, prompt, **warn_of_prompts)
        response_ids = tokenizer(text, add_special_tokens=False, **warn_of_responses)["input_ids"]
        if finished and response_ids[-1:] != [tokenizer.eos_token_id]:
            response_ids = [*response_ids, tokenizer.eos_token_id]
    else:
        rendered, turn = _render(tokenizer, prompt, response, text, template_kwargs or {})
        opened = rendered.rstrip().endswith("<think>")
        if verbatim and "</think>" in text and not opened and not turn.startswith(text.strip()):
            turn = text + _end_of_turn(tokenizer, prompt, template_kwargs or {})
        if not finished:
            turn = turn.removesuffix(_end_of_turn(tokenizer, prompt, template_kwargs or {}))
        prompt_ids = tokenizer(rendered, add_special_tokens=False, **warn_of_prompts)["input_ids"]
        response_ids = tokenizer(turn, add_special_tokens=False, **warn_of_responses)["input_ids"]
    # The end of a prompt holds the question that the response answers. A truncated response loses its end token, so it
    # does not teach the model to stop there.
    return prompt_ids[-(max_prompt_tokens or 0) :], response_ids[:max_response_tokens]


def _render(tokenizer, prompt: Messages, response: Messages | str, text: str, options: dict) -> tuple[str, str]:
    """The prompt as rendered for generation, and the text that the full conversation adds to it."""
    message = {"role": "assistant", "content": text} if isinstance(response, str) else response[0]
    rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    conversation = tokenizer.apply_chat_template([*prompt, message], tokenize=False, **options)
    if not conversation.startswith(rendered):
        raise ValueError(
            "the chat template renders a conversation differently from its prompt followed by the response: "
            "give the tokenizer one whose generation prompt is the start of an assistant turn"
        )
    return rendered, conversation[len(rendered) :]


def _end_of_turn(tokenizer, prompt: Messages, options: dict) -> str:
    """What the chat template puts after a response: the common end of two responses without a common letter."""
    turns = [_render(tokenizer, prompt, text, text, options)[1] for text in ("a", "b")]
    return os.path.commonprefix([turn[::-1] for turn in turns])[::-1]


def text_ids(tokenizer, text: str, **options: Any) -> list[int]:
    """Token ids of a text that another follows, without the end token that some tokenizers append to every text.

    The tokens that the tokenizer puts before a text stay, and so does an end token that the text itself contains. A
    text that begins with the begin token, as a chat template renders it, gets no second one.
    """
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return tokenizer(text, add_special_tokens=False, **options)["input_ids"]
    ids = tokenizer(text, **options)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        return ids
    own = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
    # Of an empty text, a single token is the beginning if it can be one.
    appended = ids[-len(own) :] != own if own else len(ids) > 1 or tokenizer.bos_token_id != ids[-1]
    return ids[:-1] if appended else ids


def truncate_prompt(ids: list[int], limit: int | None) -> list[int]:
    """The last `limit` tokens of a prompt, where the question is; one line a run says so. None for no limit."""
    if limit is None or len(ids) <= limit:
        return ids
    warn_once_per_run(
        f"a prompt of {len(ids)} tokens loses its beginning, with any system message: max_prompt_tokens is {limit}"
    )
    return ids[-limit:]


def prompt_text(prompt: Messages | str) -> str:
    """A plain prompt, or the text of the last user message; empty if there is none."""
    if isinstance(prompt, str):
        return prompt
    return next((message["content"] for message in reversed(prompt) if message["role"] == "user"), "")
