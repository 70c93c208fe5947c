// Browsers refuse workers on pages opened from a folder. There the search of the theme runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = () => undefined // the theme imports languages other than English only
      const script = this.frame.contentDocument.createElement("script")
      script.src = new URL(url, location)
      script.onload = () => {
        for (const data of this.waiting) this.deliver(data)
        this.waiting = null
      }
      this.frame.contentDocument.documentElement.append(script)
    }
    postMessage(data) {
      this.waiting ? this.waiting.push(data) : this.deliver(data)
    }
    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
