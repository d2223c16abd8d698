// Browsers start no worker from a page that was opened from a disk, and the search is one: there,
// a hidden frame runs the worker's script. Messages wait until the script listens.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = inside.document.createElement("script")
      script.src = address
      const listens = new Promise(resolve => { script.onload = resolve })
      inside.document.body.append(script)
      this.postMessage = async data => {
        await listens
        inside.dispatchEvent(new MessageEvent("message", {data}))
      }
    }
  }
}
