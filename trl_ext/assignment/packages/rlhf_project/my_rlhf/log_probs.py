"""What a language model says about responses, and a rollout split into minibatches."""

import torch
import torch.nn.functional as F


def sequence_log_probs(logits, input_ids, response_mask):
    """Sum of the log-probabilities of each response's tokens, in nats. [B].

    The arguments are a model's logits, [B, T, V], its tokens, [B, T], and 1 where a token is of the response, [B, T].
    Rafailov et al. 2023, arXiv 2305.18290, section 4. Hint: the logits at a position are about the next token.
    """
    ### BEGIN SOLUTION
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
    return -(losses * response_mask[:, 1:]).sum(dim=1)
    ### END SOLUTION


def completion_mask(completion_ids, eos_token_id):
    """True up to and including each row's first end-of-text token, or everywhere without one. [B, T].

    `eos_token_id` is a token or a list of several. Ziegler et al. 2019, arXiv 1909.08593.
    """
    ### BEGIN SOLUTION
    ends = torch.isin(completion_ids, torch.tensor(eos_token_id)).long()
    return ends.cumsum(dim=1) - ends == 0
    ### END SOLUTION


def split_minibatches(batch, order, minibatch_size):
    """Split a dict of tensors of N rows into a list of such dicts; the last may be smaller.

    `order`, [N], has the numbers of the rows as they are taken. Schulman et al. 2017, arXiv 1707.06347, algorithm 1.
    """
    ### BEGIN SOLUTION
    parts = [order[start : start + minibatch_size] for start in range(0, len(order), minibatch_size)]
    return [{name: values[part] for name, values in batch.items()} for part in parts]
    ### END SOLUTION
