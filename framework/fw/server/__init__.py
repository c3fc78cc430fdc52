"""An HTTP server with OpenAI's interface. This process knows no tensors: engines are processes of their own, so that whoever waits for an
answer, or for a refusal, does not wait for a step."""
