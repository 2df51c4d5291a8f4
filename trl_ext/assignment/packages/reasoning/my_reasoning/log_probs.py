"""Prompts and outputs as batches of tokens, and what a language model says about each token."""

import torch


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """Tokenize B prompts and outputs separately, join each two, and shift them for next-token prediction.

    Rows are padded on the right with the padding token, or with the end-of-text token if there is none. With L tokens
    in the longest row, returns a dict of tensors [B, L - 1]: `input_ids`, all tokens but the last; `labels`, all but
    the first; `response_mask`, True where the label is a token of the output. Ouyang et al. 2022, arXiv 2203.02155.
    """
    ### BEGIN SOLUTION
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    prompts, outputs = ([tokenizer.encode(text) for text in texts] for texts in (prompt_strs, output_strs))
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    ids, mask = torch.full((len(prompts), longest), pad), torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor(prompt + output)
        mask[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}
    ### END SOLUTION


def token_entropy(logits):
    """Entropy of each next-token distribution, in nats: [...] for logits, which may be large, of shape [..., V]."""
    ### BEGIN SOLUTION
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(dim=-1)
    ### END SOLUTION


def response_log_probs(model, input_ids, labels, return_token_entropy=False):
    """A dict with `log_probs`, the log-probability of each label, and on request `token_entropy`. Both [B, T].

    `model(input_ids).logits` has the shape [B, T, V]. Gradient flows through `log_probs`; `token_entropy` may have one
    or none. Ziegler et al. 2019, arXiv 1909.08593.
    """
    ### BEGIN SOLUTION
    logits = model(input_ids).logits
    log_probs = torch.log_softmax(logits, dim=-1)
    result = {"log_probs": torch.gather(log_probs, 2, labels[..., None])[..., 0]}
    if return_token_entropy:
        result["token_entropy"] = token_entropy(logits)
    return result
    ### END SOLUTION
