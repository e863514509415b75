"""Prompts in: datasets with a strict scan, built-in tasks, and the sampler that draws from them."""

from penstock.data.dataset import DatasetConfig
from penstock.data.generators import (
    AdditionConfig,
    GeneratorConfig,
    OneLineFunctionConfig,
    ReverseWordConfig,
    SortLettersConfig,
    WordConfig,
)
from penstock.data.gym import ReasoningGymConfig
from penstock.data.prompts import PromptSet, PromptSourceConfig
from penstock.data.sameness import check_same_prompts, remember_prompts
from penstock.data.sampler import EndOfData, Sampler, SamplerConfig, WaitingGroups
from penstock.data.verifiers import VerifiersTasksetConfig

__all__ = [
    "AdditionConfig",
    "DatasetConfig",
    "EndOfData",
    "GeneratorConfig",
    "OneLineFunctionConfig",
    "PromptSet",
    "PromptSourceConfig",
    "ReasoningGymConfig",
    "ReverseWordConfig",
    "Sampler",
    "SamplerConfig",
    "SortLettersConfig",
    "VerifiersTasksetConfig",
    "WaitingGroups",
    "WordConfig",
    "check_same_prompts",
    "remember_prompts",
]
