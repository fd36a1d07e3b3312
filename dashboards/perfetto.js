"use strict";
// Hands a trace to Perfetto's page: ping until it answers, then give it the bytes (perfetto.dev, "Deep linking").
const perfetto = (() => {
  const PERFETTO = "https://ui.perfetto.dev";

  const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;

  const say = (button, text) => {
    button.closest(".perfetto").querySelector("[role=status]").textContent = text;
  };

  // The window is opened at once, while the click still allows it; the bytes may come later.
  const hand = async (button, bytes, fileName) => {
    if (!navigator.onLine) {
      say(button, "This machine is offline; Perfetto's page needs a network.");
      return;
    }
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
    const late = setTimeout(() => say(button, "Perfetto does not answer. Can this machine reach ui.perfetto.dev?"), 15000);
    const stop = (text) => {
      clearInterval(ping);
      clearTimeout(late);
      window.removeEventListener("message", answer);
      say(button, text);
    };
    const answer = ({ origin, source, data }) => {
      if (origin !== PERFETTO || source !== target || data !== "PONG") return;
      target.postMessage({ perfetto: { buffer, title: fileName, fileName } }, PERFETTO);
      stop("Opened in Perfetto.");
    };
    window.addEventListener("message", answer);
  };

  const add = (within) => {
    for (const box of within.querySelectorAll(".perfetto")) {
      const button = box.querySelector("button");
      const chooser = box.querySelector("input[type=file]");
      box.querySelector(".handover").hidden = false;
      button.addEventListener("click", () => {
        if (chooser) chooser.click();
        else hand(button, bytesOf(document.getElementById(box.dataset.content).textContent), box.dataset.name);
      });
      box.querySelector(".save")?.addEventListener("click", () => {
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([bytesOf(document.getElementById(box.dataset.content).textContent)]));
        link.download = box.dataset.name;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 1000);
      });
      chooser?.addEventListener("change", () => {
        const [file] = chooser.files;
        if (file) hand(button, file.arrayBuffer(), file.name);
        chooser.value = "";
      });
    }
  };
  add(document);
  return { add };
})();
