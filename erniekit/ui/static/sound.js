// Record from the microphone, and write WAV, which every reader of recordings knows.

/** Begin to record. Return a function that ends it and gives the recording as a WAV file. */
export async function record() {
  if (!navigator.mediaDevices) throw new Error("this browser lets pages record on https:// and on this machine's own addresses only");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const context = new AudioContext();
  const pieces = [];
  try {
    await context.audioWorklet.addModule(new URL("recorder.js", import.meta.url));
  } catch (error) {
    stream.getTracks().forEach((track) => track.stop());
    throw error;
  }
  const source = context.createMediaStreamSource(stream), node = new AudioWorkletNode(context, "recorder");
  node.port.onmessage = ({ data }) => pieces.push(data);
  source.connect(node);
  return async () => {
    source.disconnect();
    stream.getTracks().forEach((track) => track.stop());
    const rate = context.sampleRate;
    await context.close();
    return wav(pieces, rate);
  };
}

/** Return samples from -1 to 1 as a WAV file of 16 bits, one channel. */
export function wav(pieces, rate) {
  const count = pieces.reduce((sum, piece) => sum + piece.length, 0);
  const view = new DataView(new ArrayBuffer(44 + 2 * count));
  const word = (at, text) => [...text].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, 36 + 2 * count, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, 2 * count, true);
  let at = 44;
  for (const piece of pieces) {
    for (const sample of piece) {
      view.setInt16(at, Math.round(32767 * Math.max(-1, Math.min(1, sample))), true);
      at += 2;
    }
  }
  return new Blob([view], { type: "audio/wav" });
}

/** Return a file's bytes as base64. */
export async function base64(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

/** Return a WAV file whose header says how long it is: one that comes as a stream cannot know when it begins. */
export async function withLength(blob) {
  const view = new DataView(await blob.arrayBuffer());
  if (view.byteLength < 44 || view.getUint32(36) !== 0x64617461) return blob; // "data"
  view.setUint32(4, view.byteLength - 8, true);
  view.setUint32(40, view.byteLength - 44, true);
  return new Blob([view], { type: "audio/wav" });
}
