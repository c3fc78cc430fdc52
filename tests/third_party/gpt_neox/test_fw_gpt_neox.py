"""GPT-NeoX passes what every model plugin must, and is transformers' GPTNeoXForCausalLM."""

from fw_gpt_neox import GPTNeoX

from fw import testing


class TestGPTNeoX(testing.ModelSuite):
    plugin = GPTNeoX
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
