"""What a language model says about responses.

Logits are [B, T, V], those at a position about the next token; tokens and masks are [B, T].
"""

import torch
import torch.nn.functional as F


def sequence_log_probs(logits, input_ids, response_mask):
    """Sum of the log-probabilities of each response's tokens, in nats, [B]; the mask is 1 there. arXiv 2305.18290."""
    ### BEGIN SOLUTION
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
    return -(losses * response_mask[:, 1:]).sum(dim=1)
    ### END SOLUTION


def completion_mask(completion_ids, eos_token_id):
    """True up to and including each row's first end-of-text token: `eos_token_id`, or one of several in a list."""
    ### BEGIN SOLUTION
    ends = torch.isin(completion_ids, torch.tensor(eos_token_id)).long()
    return ends.cumsum(dim=1) - ends == 0
    ### END SOLUTION
