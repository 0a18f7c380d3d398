"""vLLM servers as a rollout engine; imported only when rollout_engine="server" asks for it."""
