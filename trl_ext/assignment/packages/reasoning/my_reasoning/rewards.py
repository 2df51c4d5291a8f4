"""From responses to answers, rewards and advantages."""

import re

import torch


def compute_group_normalized_rewards(
    reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps, normalize_by_std
):
    """Advantages [N], rewards [N], in float32, and a dict of metadata, which the tests do not read.

    `reward_fn(response, truth)["reward"]` is a reward. Responses to one prompt form a group of `group_size`. An
    advantage is `(r - mean) / (std + advantage_eps)` with the sample's deviation, or `r - mean`. A group of equal
    rewards has advantages of exactly 0. Shao et al. 2024, arXiv 2402.03300. Hint: torch's std is the sample's.
    """
    ### BEGIN SOLUTION
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    rewards = torch.tensor([reward_fn(response, truth)["reward"] for response, truth in pairs])
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(dim=-1, keepdim=True)
    if normalize_by_std:
        advantages = advantages / (groups.std(dim=-1, keepdim=True) + advantage_eps)
    advantages[(groups == groups[:, :1]).all(dim=-1)] = 0
    return advantages.flatten(), rewards, {"mean": rewards.mean().item()}
    ### END SOLUTION


def parse_gsm8k_response(model_output):
    """The last number of a response, as a text without thousands separators or currency; None without a number.

    Cobbe et al. 2021, arXiv 2110.14168.
    """
    ### BEGIN SOLUTION
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", model_output)
    return found[-1].replace(",", "") if found else None
    ### END SOLUTION


def parse_mmlu_response(mmlu_example, model_output):
    """The letter of the option, A to D, that a response chooses; None if it chooses none.

    In this order: the last `answer is B`; a letter that begins the response, as `B` or `(B)`; `option B`; the text of
    one of `mmlu_example["options"]` as the whole response. Hendrycks et al. 2020, MMLU.
    """
    ### BEGIN SOLUTION
    for form in (r"answer is \(?([A-D])\b", r"^\(?([A-D])\)?(?![\w'])", r"option ([A-D])\b"):
        found = re.findall(form, model_output)
        if found:
            return found[-1]
    options = [option.lower() for option in mmlu_example["options"]]
    return "ABCD"[options.index(model_output.lower())] if model_output.lower() in options else None
    ### END SOLUTION
