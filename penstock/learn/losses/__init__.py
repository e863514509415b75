"""What is minimised: one file and one configuration class per loss. Nothing here imports torch.

ppo      the clipped ratio of each token
gspo     the clipped ratio of a whole answer
cispo    the ratio as a capped weight; no token loses its gradient
dppo     a token counts until its probability has moved far enough
pg       the plain policy gradient
custom   a function of the user's
"""

from penstock.learn.losses.aggregation import answer_weights
from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens
from penstock.learn.losses.cispo import CISPOLossConfig, cispo
from penstock.learn.losses.custom import CustomLossConfig
from penstock.learn.losses.dppo import DPPOLossConfig, dppo
from penstock.learn.losses.gspo import GSPOLossConfig, gspo
from penstock.learn.losses.pg import PGLossConfig, policy_gradient
from penstock.learn.losses.ppo import PPOLossConfig, ppo

LOSSES: dict[str, type[LossConfig]] = {
    "ppo": PPOLossConfig,
    "gspo": GSPOLossConfig,
    "cispo": CISPOLossConfig,
    "dppo": DPPOLossConfig,
    "pg": PGLossConfig,
}
"""By the word that stands for a loss with its defaults."""

__all__ = [
    "LOSSES",
    "CISPOLossConfig",
    "CustomLossConfig",
    "DPPOLossConfig",
    "GSPOLossConfig",
    "LossConfig",
    "LossFunction",
    "LossTerms",
    "LossTokens",
    "PGLossConfig",
    "PPOLossConfig",
    "answer_weights",
    "cispo",
    "dppo",
    "gspo",
    "policy_gradient",
    "ppo",
]
