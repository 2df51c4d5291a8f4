"""BCO: a binary classifier that tells chosen from rejected responses, with shifted rewards.

Jung et al. 2024, Binary Classifier Optimization for Large Language Model Alignment, arXiv 2404.04656.

    accelerate launch recipes/preference.py --loss recipes/own/bco.py:bco --beta 0.01
"""

from torch.nn.functional import logsigmoid

from trl_ext import preference_loss


@preference_loss("bco", batch_coupled=True, paper="2404.04656")
def bco(scores, *, beta=0.01):
    """`-log s(r_c - d) - log s(d - r_r)`, with r beta times a log-ratio to the reference. [B].

    The shift d is half the sum of the mean rewards of chosen and of rejected responses over the optimizer batch,
    without gradient. The paper averages over all data, and its weights for prompts of different distributions are not
    built in.
    """
    chosen, rejected = beta * scores.chosen_log_ratio, beta * scores.rejected_log_ratio
    shift = (chosen.mean() + rejected.mean()).detach() / 2
    return -logsigmoid(chosen - shift) - logsigmoid(shift - rejected)
