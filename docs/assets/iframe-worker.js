// Search in pages opened from disk: for them browsers start no workers, so a hidden frame runs the worker's script.
// The theme looks for the name `IFrameWorker`, and for `importScripts` that returns a promise.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement("script")
      const loaded = new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
      })
      script.src = url
      this.inside.document.body.append(script)
      return loaded
    }

    async postMessage(data) {
      await this.ready
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
