/* Browsers refuse workers to pages that are opened from a folder, and the search is a worker.
   There it runs in a hidden frame instead: the same script, the same messages. */

(() => {
  if (window.location.protocol !== "file:") return;

  const load = (scope, url) => new Promise((resolve, reject) => {
    const script = scope.document.createElement("script");
    script.src = new URL(url, document.baseURI).href;
    script.onload = resolve;
    script.onerror = reject;
    scope.document.body.append(script);
  });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      scope.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(scope, each)), Promise.resolve());
      load(scope, url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (!this.ready) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() { this.frame.remove(); }

    set onmessage(listener) { this.addEventListener("message", listener); }
  };
})();
