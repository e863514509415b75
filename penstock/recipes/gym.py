"""A procedurally generated task of reasoning-gym, scored by its own scorer.

    penstock train gym
    penstock train gym --set model=Qwen/Qwen2.5-0.5B-Instruct

Needs the extra `gym`. The task here counts letters; set `name` to any other task of reasoning-gym, in both splits.
"""

from penstock.agent_loop import SingleTurnAgentLoopConfig
from penstock.data import ReasoningGymConfig, SamplerConfig
from penstock.engine import EmbeddedEngineConfig
from penstock.judger import reasoning_gym_score
from penstock.learn import TrainWorkerConfig
from penstock.produce import AgentLoopManagerConfig, TaskSpecConfig
from penstock.rollout import SampleParams
from penstock.trainer import EvaluatorConfig, RLColocateTrainerConfig

letters = ReasoningGymConfig(
    name="letter_counting",
    params={"min_words": 1, "max_words": 4},
    template="{question} Answer with the number only.",
    size=500,
    held_out=50,
)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=16))

trainer = RLColocateTrainerConfig(
    model="smollm2-135m",
    engine=EmbeddedEngineConfig(max_running=64),
    train=TrainWorkerConfig(lr=1e-5),
    manager=AgentLoopManagerConfig(
        tasks=[
            TaskSpecConfig(
                task_name="letters",
                sampler_config=SamplerConfig(dataset=letters, prompt_repeat_k=8),
                agent_loop_config=answer,
                judger_config=reasoning_gym_score,
            )
        ]
    ),
    evaluator=EvaluatorConfig(
        tasks=[
            TaskSpecConfig(
                task_name="letters",
                sampler_config=SamplerConfig(dataset=letters.replace("split", "eval"), prompt_repeat_k=1),
                agent_loop_config=answer,
                judger_config=reasoning_gym_score,
            )
        ],
        greedy=True,
    ),
    total_steps=50,
    train_batch_size=8,
    eval_interval=25,
    seed=0,
)
