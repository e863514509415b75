"""Text generation: engines behind the `Engine` port.

`EmbeddedEngineConfig` builds the engine that needs nothing but torch, in this process or its own; `VllmEngineConfig`
builds vLLM in a process of its own; `EnginesConfig` builds as many as a run needs behind their one door, the
`RolloutController`, and the channel that brings weights to them. Importing this package imports no torch.

torch_engine/  the embedded engine
vllm.py        vLLM; vllm_answers.py is what a request becomes, vllm_door.py what a pause does to it,
               vllm_environment.py what vLLM finds when it starts
process.py     an engine in its own process; frames.py, remote.py and server.py are the wire between them, hosted.py
               what is built there
requests.py    what every engine refuses, the answers that need no model, and those that cannot be true
controller.py  the one door; routing.py gives requests to engines, publishing.py gives them weights, membership.py
               lets them join and leave
lifecycle.py   the states of the engines, a pure machine; health.py carries out what it decides, recovery.py watches
               the engines and brings them back
"""

from penstock.engine.config import (
    EmbeddedEngineConfig,
    EngineConfig,
    EnginesConfig,
    RolloutControllerConfig,
    VllmEngineConfig,
)

__all__ = ["EmbeddedEngineConfig", "EngineConfig", "EnginesConfig", "RolloutControllerConfig", "VllmEngineConfig"]
