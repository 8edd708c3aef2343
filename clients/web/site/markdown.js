import{a,b}from"./chunk-32GLXUZB.js";import"./chunk-OOJM4CTU.js";export{a as Answer,b as copied};
