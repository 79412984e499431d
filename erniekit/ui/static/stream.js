// Read an answer that comes piece by piece, as server-sent events of the OpenAI protocol.

/** Yield the pieces of text of a streamed chat completion. Throw the error that comes in the stream, if one does. */
export async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const text = line.slice(5).trim();
        if (text === "[DONE]") return;
        const event = JSON.parse(text);
        if (event.error) throw new Error(event.error.message ?? String(event.error));
        const piece = event.choices?.[0]?.delta?.content;
        if (piece) yield piece;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
