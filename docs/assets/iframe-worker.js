// Stand-in for Web Workers on pages that are opened from a folder: browsers refuse workers on file://. The worker's
// script, which is the site's search, runs in a hidden frame instead. Material's plugin `offline` looks for this file's
// name, and would load a script from the network without it. The search's script looks for `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const scope = this.frame.contentWindow;
      // A document that was written is not replaced later by the frame's empty page.
      scope.document.open();
      scope.document.write("<!DOCTYPE html><body></body>");
      scope.document.close();
      // The worker's answers go to the page's listeners.
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      scope.document.body.appendChild(script);
    }

    postMessage(data) {
      const scope = this.frame.contentWindow;
      this.loaded.then(() => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
