"""Prompts and outputs as batches of tokens, and what a language model says about each token."""

import torch
from torch.nn.utils.rnn import pad_sequence


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """Tokenize B prompts and outputs separately, join each two, and pad on the right, without a padding token by eos.

    Returns a dict of tensors [B, L - 1] for L tokens in the longest row: `input_ids`, all but the last; `labels`, all
    but the first; `response_mask`, True where the label is a token of the output.
    """
    ### BEGIN SOLUTION
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    prompts, outputs = (
        [torch.tensor(tokenizer.encode(text)) for text in given] for given in (prompt_strs, output_strs)
    )
    rows = [torch.cat(each).long() for each in zip(prompts, outputs, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    masks = [torch.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    mask = pad_sequence(masks, batch_first=True)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}
    ### END SOLUTION


def token_entropy(logits):
    """Entropy of each next-token distribution, in nats: [...] for logits, which may be large, of shape [..., V]."""
    ### BEGIN SOLUTION
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(dim=-1)
    ### END SOLUTION


def response_log_probs(model, input_ids, labels, return_token_entropy=False):
    """A dict of `log_probs` of the labels, and on request `token_entropy`, [B, T], by `model(input_ids).logits`."""
    ### BEGIN SOLUTION
    logits = model(input_ids).logits
    log_probs = torch.log_softmax(logits, dim=-1)
    result = {"log_probs": torch.gather(log_probs, 2, labels[..., None])[..., 0]}
    if return_token_entropy:
        result["token_entropy"] = token_entropy(logits)
    return result
    ### END SOLUTION
