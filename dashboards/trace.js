"use strict";
// A link to a trace unfolds it.
(() => {
  const unfold = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  window.addEventListener("hashchange", unfold);
  unfold();
})();

// Hands a trace to Perfetto's page: ping until it answers, then give it the bytes (perfetto.dev, "Deep linking").
(() => {
  const PERFETTO = "https://ui.perfetto.dev";

  const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;

  const say = (button, text) => {
    button.closest(".perfetto").querySelector("[role=status]").textContent = text;
  };

  // The window is opened at once, while the click still allows it; the bytes may come later.
  const hand = async (button, bytes, fileName) => {
    const target = window.open(PERFETTO);
    if (!target) {
      say(button, "The browser blocked the new window; allow it for this page and try again.");
      return;
    }
    say(button, "Waiting for Perfetto to answer…");
    let buffer;
    try {
      buffer = await bytes;
    } catch {
      target.close();
      say(button, "The file cannot be read.");
      return;
    }
    const ping = setInterval(() => {
      if (target.closed) stop("The window was closed before Perfetto answered.");
      else target.postMessage("PING", PERFETTO);
    }, 50);
    const late = setTimeout(() => say(button, "Perfetto does not answer yet; is its page reachable?"), 15000);
    const stop = (text) => {
      clearInterval(ping);
      clearTimeout(late);
      window.removeEventListener("message", answer);
      say(button, text);
    };
    const answer = ({ origin, source, data }) => {
      if (origin !== PERFETTO || source !== target || data !== "PONG") return;
      target.postMessage({ perfetto: { buffer, title: fileName, fileName } }, PERFETTO);
      stop("Handed to Perfetto.");
    };
    window.addEventListener("message", answer);
  };

  for (const box of document.querySelectorAll(".perfetto")) {
    const button = box.querySelector("button");
    const chooser = box.querySelector("input[type=file]");
    box.querySelector(".handover").hidden = false;
    button.addEventListener("click", () => {
      if (chooser) chooser.click();
      else hand(button, bytesOf(document.getElementById(box.dataset.content).textContent), box.dataset.name);
    });
    chooser?.addEventListener("change", () => {
      const [file] = chooser.files;
      if (file) hand(button, file.arrayBuffer(), file.name);
      chooser.value = "";
    });
  }
})();
