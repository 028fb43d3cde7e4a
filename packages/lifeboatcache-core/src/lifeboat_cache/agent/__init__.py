"""The node agent: what looks after the store beside the engines.

One process per node and home directory reclaims space (the janitor), compiles
kernels, adds up what ended processes have counted, and serves Prometheus. Engines
start it with :func:`ensure_agent` and never wait for it; without it they go on.
"""

from lifeboat_cache.agent.starter import ensure_agent
from lifeboat_cache.agent.status import AgentState, AgentStatus, agent_status

__all__ = ["AgentState", "AgentStatus", "agent_status", "ensure_agent"]
