// Runs beside the page's own thread: passes on what the microphone hears, one channel.
registerProcessor("recorder", class extends AudioWorkletProcessor {
  process([[channel]]) {
    if (channel) this.port.postMessage(channel.slice());
    return true;
  }
});
