"""Proofs of MLA classes (DeepSeek, Kimi) on CPU: SGLang sends its torch_native backend down the wrong path.

It takes the multi-head path there while the cache holds compressed rows, and fails on their width. Everything else
that MLA needs works. Only `hs_ray.prove` uses this entry.
"""

from typing import Any

from hs_ray.engine.entry import SchedulerEntry


class MlaSchedulerEntry(SchedulerEntry):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

        AttentionBackendRegistry.register("torch_native", lambda attn, forward_batch: AttnForwardMethod.MLA)
        return super().__call__(*args, **kwargs)
