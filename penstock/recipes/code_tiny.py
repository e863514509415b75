"""A model of two layers learns to write functions of one line, judged by running them in a sandbox.

    penstock train code-tiny

The model is made on the spot and writes about every third function right. Each answer is run against four tests, in a
sandbox: bubblewrap where it is installed, else namespaces or limits, whichever this machine allows.
"""

from penstock import (
    CodeJudgerConfig,
    EmbeddedEngineConfig,
    EnginesConfig,
    EvalTaskConfig,
    EvaluatorConfig,
    OneLineFunctionConfig,
    RLColocateTrainerConfig,
    SampleParams,
    SamplerConfig,
    SandboxConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
)

functions = OneLineFunctionConfig(template="{task}>", held_out=70)
answer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=26))
# The same function is written often: what was run once is remembered.
runs = CodeJudgerConfig(sandbox=SandboxConfig(warm=4, max_running=4), cache_size=10_000)

trainer = RLColocateTrainerConfig(
    model="tiny-code",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=128)),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=[
        TaskSpecConfig(
            task_name="functions",
            sampler_config=SamplerConfig(dataset=functions, prompt_repeat_k=8),
            agent_loop_config=answer,
            judger_config=runs,
        )
    ],
    evaluator=EvaluatorConfig(
        tasks=[
            EvalTaskConfig(
                task_name="functions",
                dataset=functions.replace("split", "eval"),
                agent_loop_config=answer,
                judger_config=runs,
            )
        ],
        greedy=True,
    ),
    total_steps=30,
    train_batch_size=16,
    eval_interval=15,
    seed=0,
)
