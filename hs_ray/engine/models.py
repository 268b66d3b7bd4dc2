"""How each model class gives its states, per SGLang release.

Four ways, all in SGLang's own loop over the decoder layers:
    native    the inner model tests `i in self.layers_to_capture`: the list is assigned
    setter    the inner model flags its layers: its own (inner) setter is called, which takes our ids
    hook      a pre-hook on the layer adds hidden and residual: for classes whose native capture is absent or
              wrong (on 0.5.23 Gemma 3 leaves the residual out), and whose layers take both as tensors
    boundary  0.5.23: the layer's attention boundary is asked for the state that it completes, as SGLang's own native
              capture does: for classes without one, whose layers pass opaque handles

Id N is the input of the final norm, by a hook on it, for every class. A model's own
`set_eagle3_layers_to_capture` is never called on the outer model: its meaning changes with the class and
with the first id.

A class is used only where its values were proven against transformers (hs_ray.prove); an entry here says how,
not that.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    how: str  # native, setter, hook or boundary
    norm: str = "norm"  # attribute of the final norm on the module that owns the layers
    embedding_hook: bool = False  # id 0 by the hook, see below
    residual: bool = True  # False: hidden alone is the stream; the residual handed on beside it is in it already

    def __str__(self) -> str:
        """Short, for tables and proofs: `native`, `hook, hidden alone`."""
        notes = (
            "" if self.norm == "norm" else self.norm,
            "embeddings by hook" if self.embedding_hook else "",
            "" if self.residual else "hidden alone",
        )
        return ", ".join([self.how, *filter(None, notes)])


NATIVE = Entry("native")
SETTER = Entry("setter")
HOOK = Entry("hook")
HIDDEN = Entry("hook", residual=False)
BOUNDARY = Entry("boundary")

_BOTH = {
    "LlamaForCausalLM": NATIVE,
    "MistralForCausalLM": NATIVE,
    "Phi3ForCausalLM": NATIVE,
    "Qwen2ForCausalLM": NATIVE,
    "Qwen3ForCausalLM": NATIVE,
    "Qwen2MoeForCausalLM": SETTER,
    "Qwen3MoeForCausalLM": SETTER,
    "Qwen3NextForCausalLM": SETTER,
    "Gemma2ForCausalLM": HOOK,
    "Gemma3ForCausalLM": HOOK,
    "Gemma3ForConditionalGeneration": HOOK,
    "GptOssForCausalLM": NATIVE,
    "Glm4ForCausalLM": NATIVE,
    "Glm4MoeForCausalLM": NATIVE,
    "DeepseekV2ForCausalLM": NATIVE,
    "DeepseekV3ForCausalLM": NATIVE,
    "KimiK25ForConditionalGeneration": NATIVE,
    "MiniMaxM2ForCausalLM": NATIVE,
    "Llama4ForConditionalGeneration": NATIVE,
    "Olmo2ForCausalLM": HOOK,
    "GraniteForCausalLM": HOOK,
    "CohereForCausalLM": HIDDEN,
}
# On 0.5.17 a native id 0 is wrong: some classes add a residual that is None there, others hand out the embeddings
# themselves, which the first layer's fused norm then overwrites (found by proof, on CUDA).
_FIRST_BY_HOOK = {name: Entry("native", embedding_hook=True) for name, entry in _BOTH.items() if entry is NATIVE}

_ENTRIES: dict[str, dict[str, Entry]] = {
    "0.5.17": {
        **_BOTH,
        **_FIRST_BY_HOOK,
        "MiniMaxM2ForCausalLM": NATIVE,  # its loop copies id 0: proven as it is
        "MixtralForCausalLM": HOOK,
    },
    "0.5.23": {**_BOTH, "MixtralForCausalLM": BOUNDARY},
}


# Classes that SGLang runs and hs_ray does not take, where there is more to say than that no entry exists.
_WIDE = "several residual streams run side by side (hyper-connections), and no single state is the model's"
_SCALED = "what reaches its logits is scaled, and drafters are trained on what is not"
REFUSED = {
    "MiniCPMForCausalLM": _SCALED,
    "MiniCPM3ForCausalLM": _SCALED,
    "MiniCPMSALAForCausalLM": _SCALED,
    "InklingForConditionalGeneration": _SCALED,
    "DeepseekV4ForCausalLM": _WIDE,
    "Glm5NextForCausalLM": _WIDE,
    "KimiK3ForConditionalGeneration": _WIDE,
    "Qwen4ExpForCausalLM": _WIDE,
    "Llama4ForCausalLM": (
        "SGLang loads its experts only inside Llama4ForConditionalGeneration, as the model is published, and leaves "
        "them as they are in memory otherwise"  # found by proof, on CUDA: inf
    ),
    "Gemma3nForConditionalGeneration": "each layer works on several versions of the stream (AltUp)",
}

# Classes that SGLang's own CPU path cannot run, on 0.5.23.
NOT_ON_CPU = {
    "GptOssForCausalLM": "torch_native is not among its attention backends",
    "Llama4ForConditionalGeneration": "the CPU's experts cannot take router weights on their input",
    "MiniMaxM2ForCausalLM": "its norm of queries and keys is a CUDA kernel",
    "Qwen2MoeForCausalLM": "the gate of its shared expert is a Triton kernel",
    "Qwen3NextForCausalLM": "its linear attention asks for a CUDA device",
}


def supported(release: str) -> list[str]:
    return sorted(_ENTRIES.get(release, {}))


def entry_for(architecture: str, release: str) -> Entry | None:
    """How `architecture` (config.json `architectures[0]`) is captured on this release; None: not supported."""
    return _ENTRIES.get(release, {}).get(architecture)


def refusal(architecture: str, release: str, device: str | None = None) -> str | None:
    """Why the class is not supported, as one sentence; None if it is. device: None where it is not known yet."""
    if entry_for(architecture, release) is not None:
        if device == "cpu" and architecture in NOT_ON_CPU:
            return f"{architecture} does not run in SGLang on CPU: {NOT_ON_CPU[architecture]}"
        return None
    reason = f": {REFUSED[architecture]}" if architecture in REFUSED else ""
    return f"{architecture} is not supported with SGLang {release}{reason}; supported: {', '.join(supported(release))}"
